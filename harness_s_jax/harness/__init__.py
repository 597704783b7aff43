"""How the policy is made to act: specs, operations, the one loop, the token ledger."""
