"""`headrace plan`: how much memory a recipe needs, before any weights are downloaded."""
