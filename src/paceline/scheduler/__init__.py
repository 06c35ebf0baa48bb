"""The process that keeps the membership of the job."""
