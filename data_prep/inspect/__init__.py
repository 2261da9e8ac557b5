"""Packed sequences to look at, as training will see them: python -m data_prep.inspect. Changes nothing."""
