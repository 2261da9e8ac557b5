"""Which documents are taken: filters, decontamination, near duplicates, shares of languages within a budget."""
