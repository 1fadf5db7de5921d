"""What is maximised: rewards of responses, less penalties."""
