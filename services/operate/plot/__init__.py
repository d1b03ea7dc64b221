"""`headrace plot`: draws a run. The folder also has what every figure shares."""
