"""The process that knows who is in the job."""
