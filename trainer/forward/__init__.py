"""The forward pass: weights in the served dtype, and the logprobs of the trained tokens."""
