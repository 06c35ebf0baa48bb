"""What every process of a job does: ask and be answered, stay in the job, know its hosts."""
