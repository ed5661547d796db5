"""What Experiment 6 measures: tables; nothing here draws or judges."""
