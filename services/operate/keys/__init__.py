"""`headrace keys`: key pairs for trainers, tenants and operators."""
