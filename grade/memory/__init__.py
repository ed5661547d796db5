"""What a step keeps in memory: traced on tensors without data, planned for a budget, measured on real ones.

Read `trace` first, then `step` (what is traced), `records` and `tracker` (how it is counted), `meta` and `compat` (how
code runs without data), `plan` (what fits). Import the modules themselves: importing one of them does not import all.
"""
