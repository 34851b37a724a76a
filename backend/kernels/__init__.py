"""The tensor operations: plain torch twins and their fast forms."""
