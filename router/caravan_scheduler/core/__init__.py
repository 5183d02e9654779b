"""The domain types that the packages of the router share. They import nothing of ours but the messages."""
