"""`headrace asyncapi`: the contract of a namespace for other teams."""
