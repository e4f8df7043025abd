// Loaded before the first paint, so that the page does not change its colors while it loads.
(() => {
  const root = document.documentElement;
  const saved = localStorage.getItem("calque-theme");
  if (saved === "dark" || saved === "light") root.dataset.theme = saved;

  function isDark() {
    if (root.dataset.theme) return root.dataset.theme === "dark";
    return matchMedia("(prefers-color-scheme: dark)").matches;
  }

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const name = () => {
      button.textContent = isDark() ? "Light" : "Dark";
      button.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colors`);
    };
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      localStorage.setItem("calque-theme", root.dataset.theme);
      name();
      document.dispatchEvent(new CustomEvent("theme-change"));
    });
    name();
  });
})();
