"""What a step keeps in memory: counted by formula and measured on tensors, real or fake.

Import the modules themselves (``grade.memory.tracker``, ``saved``, ``shapes``, ``formulas``): nothing is imported here,
so importing one of them does not import all.
"""
