"""Metal attention backend for MLX: K and V are read in place, through the block tables."""
