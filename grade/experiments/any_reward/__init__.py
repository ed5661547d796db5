"""Any reward: distilled in closed form, differentiated, corrected, and held against policy gradients."""
