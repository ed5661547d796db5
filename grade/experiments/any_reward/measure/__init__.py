"""What is measured of any reward: policies, rewards, tables."""
