"""What comes in: data sets, models, and the chain of layers that a model is cut into."""
