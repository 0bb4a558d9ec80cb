"""The processes of a job: modules that start the ranks, monitor them, and shut them down cleanly."""
