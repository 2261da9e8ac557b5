"""Which documents are taken: filters, decontamination, shares of languages within a budget. Knows no tasks."""
