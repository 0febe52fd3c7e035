"""handgrad"""
