"""Start, monitoring and clean shutdown of the processes of a job."""
