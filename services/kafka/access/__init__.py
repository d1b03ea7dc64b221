"""What principals may do on the brokers, and how much: ACLs and quotas."""
