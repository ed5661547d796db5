"""The entropy probe against every enumerated completion."""
