"""Decodes files of pictures and sounds that clients send, in processes of their own. Nothing is ever fetched."""
