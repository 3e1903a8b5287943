"""The engine ``hf_trainer``: Hugging Face's Trainer and Accelerate run the steps, with this project's data, loss and records."""
