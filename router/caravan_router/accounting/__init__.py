"""What each API key uses: a pure ledger of what schedulers decide, its journal and store, and the audit log."""
