"""`headrace keys`: key pairs that sign the versions of a policy."""
