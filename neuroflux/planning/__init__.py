"""What will be done: the memory budget, auxiliary heads, the profile and the partition into blocks."""
