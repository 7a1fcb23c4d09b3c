"""What speculation would be worth on this machine, before it is used: measured costs, and the analytic model."""
