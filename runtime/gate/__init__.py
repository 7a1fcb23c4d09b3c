"""What the regression gate measures: counts of fixed programs, and times of a fixed model against each other."""
