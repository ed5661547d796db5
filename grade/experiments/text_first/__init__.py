"""Text first: rewards distilled from scored text, before the policy has written any."""
