"""What is reused in a request's prompt: its layout, the plan, and what is learned from it. No tensors."""
