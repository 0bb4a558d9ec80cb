"""The processes of a job: starting ranks, watching them, and ending them well."""
