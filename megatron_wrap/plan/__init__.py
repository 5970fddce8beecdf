"""What a model costs on a layout, without torch: costs of its layers, and splits over pipeline stages by them."""
