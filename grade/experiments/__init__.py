"""What the experiments' notebooks call, and nothing that only a stage or a command needs."""
