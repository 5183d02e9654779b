"""The domain types that all packages of the router use. Imports no other package of Caravan."""
