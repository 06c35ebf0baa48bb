"""What processes of every role do: ask and answer, stay in the job, know their hosts."""
