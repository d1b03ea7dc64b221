"""`headrace sft`: supervised fine-tuning of a recipe's policy."""
