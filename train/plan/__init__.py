"""What a run will take, before it begins: operations, memory, hours. Needs no weights and no GPU."""
