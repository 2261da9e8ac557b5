"""A model directory, read: weights and adapters, what may draft or be compared with them, several processes."""
