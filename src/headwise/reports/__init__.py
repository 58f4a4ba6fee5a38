"""Result objects as pages: one HTML file each, which loads nothing from anywhere."""
