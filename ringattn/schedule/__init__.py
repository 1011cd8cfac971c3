"""Who sends what when: schedules as lists of transfers, and each rank's program of instructions."""
