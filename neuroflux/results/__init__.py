"""What people look at: progress, TensorBoard events and the final report."""
