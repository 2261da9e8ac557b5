"""What this project claims of training on a GPU, checked and measured on the one at hand, without downloads."""
