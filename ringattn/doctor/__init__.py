"""`python -m ringattn doctor`, on every rank of a job: it examines the machines before a long run."""
