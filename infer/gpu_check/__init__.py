"""What this project claims of a GPU, checked and measured on the one at hand, without downloads."""
