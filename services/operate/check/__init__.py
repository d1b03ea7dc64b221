"""`headrace check`: tries a recipe before anything is started."""
