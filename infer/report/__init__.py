"""Reports: JSON, tables, plots and one page of what infer.speed and infer.quality measured."""
