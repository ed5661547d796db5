"""Reviews and base models: fetched, cleaned, converted, trained."""
