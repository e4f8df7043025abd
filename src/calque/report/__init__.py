"""Result files in, figures for readers out."""
