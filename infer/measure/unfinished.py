"""What a run in units leaves in its folder until it is finished, by name: for its maker and its reporter."""

HEADER = "header.json"  # what all units share
UNITS = "units"  # the folder of their files
